"""The joint graph and its plan as a picture: what is drawn together, and Graphviz's text of it."""
