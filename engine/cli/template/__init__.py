"""What `midstride init` writes, beside job.yaml; each folder is one of its kinds, and an example of the documentation.

model  whether a point lies in a circle: a module and its data, to put your own in their place
"""
