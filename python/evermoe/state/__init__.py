"""State that must survive: a model, its optimizer and the training loop, as units."""
