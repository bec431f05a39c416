"""Memory without sequences: arenas in blocks, sealed pages by name and layer, and work on streams of its own."""
