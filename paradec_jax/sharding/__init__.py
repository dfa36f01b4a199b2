"""Where arrays lie on several devices: the mesh, the rules from logical axes to its axes, and
layouts of whole trees.

Nothing is imported here, since networks and drivers need `mesh` and `rules` alone.
"""
