"""States of layers without attention to earlier tokens: a recurrent state for each sequence instead of pages."""
