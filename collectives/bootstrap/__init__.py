"""Start-up: ranks find each other, their locality and their transport."""
