"""Objects that propose draft tokens: one file a drafter, `base.py` has the contract."""
