"""The distributed optimizer and its two methods."""
