"""The cost model's names, from `collectives/tools/cost.py`, and `python -m collectives.cost`."""

from collectives.tools.cost import ASSUMED, OPS, Cost, LinkRates, Rate, estimate, one_launch

__all__ = ["ASSUMED", "OPS", "Cost", "LinkRates", "Rate", "estimate", "one_launch"]

if __name__ == "__main__":
    from collectives.tools.commands import cost

    cost()
