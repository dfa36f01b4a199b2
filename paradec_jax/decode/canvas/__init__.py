"""What decoders of canvases share: the canvas, the rules that reveal its positions, the spans that
a call reads.
"""
