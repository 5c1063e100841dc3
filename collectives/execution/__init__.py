"""Running schedules: lowering, the executor, and the all-reduces built on it."""
