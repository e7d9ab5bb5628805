"""Results to tables and pages."""
