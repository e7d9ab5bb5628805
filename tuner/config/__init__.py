"""What a run is made of: the schema of best.yaml, its YAML form, and overrides by dotted name."""
