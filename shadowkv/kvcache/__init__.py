"""The KV cache: parts, presets and pages."""
