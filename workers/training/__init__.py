"""Training a draft head for a target: its own text, features by the engine's model, the head."""
