"""Differentiation rules, one file a family; `table.RULES` lists them all."""
