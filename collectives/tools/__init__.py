"""Tools that read, price, draw or time what the core runs; the core works without them."""
