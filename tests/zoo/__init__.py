"""Full training steps of many kinds, each from its library's own layers and a different optimizer."""
