"""Files of `midstride init` beside job.yaml; each folder is a kind and an example.

model  whether a point lies in a circle: a module and its data, to put your own in their place
"""
