"""Zygotes of a slot: one process per engine environment that has imported everything, and forks of it."""
