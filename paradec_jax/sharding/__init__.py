"""Where arrays lie on several devices: the mesh, the rules from logical axes to its axes, and layouts of whole trees.

`mesh` and `rules` stand on the ground floor, since networks and drivers constrain their arrays by them; `layout`
reads the table of logical axes. Nothing is imported here, so that the first two need not the third.
"""
