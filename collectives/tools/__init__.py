"""Tools that draw, price, trace, time or analyse what the core runs, which works without them."""
