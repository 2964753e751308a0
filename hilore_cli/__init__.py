"""hilore: measure an actor's memory once, solve a plan, apply it in training."""
