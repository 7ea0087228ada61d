"""Champions: the weights that nights put in charge of a job, and how a challenger takes their place. Needs no torch."""
