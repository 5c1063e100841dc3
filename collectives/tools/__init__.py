"""Tools that draw, price, trace, time or analyse collectives; the core works without them."""
