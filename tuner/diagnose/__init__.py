"""What is wrong on this machine, with this config, in this profile: each finding says what to do.

Nothing here raises for what it finds; a file that cannot be read is a finding too.
"""
