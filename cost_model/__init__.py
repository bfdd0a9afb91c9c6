"""What a plan costs: seconds and bytes a device, from hardware data files and sympy formulas."""
