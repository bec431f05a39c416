"""What a server has to survive: fuzzed bodies and files, mixed and hostile load, kills."""
