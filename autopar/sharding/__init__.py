"""Layouts, axes and the rules that say how each operator can be split."""
