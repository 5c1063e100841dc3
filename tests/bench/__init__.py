"""Tests of the bench's own logic: what it counts, refuses and concludes."""
