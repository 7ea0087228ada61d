"""What `midstride init` writes, beside job.yaml.

model  whether a point lies in a circle: a module and its data, to put your own in their place
"""
