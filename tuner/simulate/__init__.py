"""What a plan costs: exact statistics, the fitted cost model, and the advice drawn from them."""
