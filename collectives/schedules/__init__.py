"""Collectives as plain data: schedules, the algorithms that make them, and their verification."""
