"""Power: how a budget in watts is shared among devices by what their instances do (Splitwise's capped token pool)."""
