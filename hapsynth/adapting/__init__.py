"""Plans that change while they run: monitor, rebalance, other shapes, autotuning."""
