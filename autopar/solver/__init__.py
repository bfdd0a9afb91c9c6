"""From strategies and their scores to a plan, and a bound on how far it is from optimal."""
