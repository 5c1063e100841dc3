"""How ranks find each other, and what they find out at start-up."""
