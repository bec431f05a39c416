"""Memory without sequences: arenas in blocks, compressed pages by name and layer, and work on streams of its own."""
