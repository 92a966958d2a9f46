"""The joint graph as the passes read it: values, token dims, ops and their costs. Changes nothing.

joint.py, builder.py          a graph read, and a graph built node by node
op_table.py, ops.py           what is known about each op: its row in op_rows/; token_rules/,
                              linearity.py: the rules that rows refer to
tokens.py                     token dims
attention.py                  what attention's operands and results hold: heads, rows of queries
attention_sizes.py            the sizes of a call of attention
heads.py, axes.py             dims of heads; the axes of loops, and a node for one chunk
sizes.py                      symbolic sizes
loop_work.py, call_work.py    products and loops; attention, collectives, traffic
node_cost.py                  operations and time of a node
device_costs.py               the costs of a device: measured_costs.py, gpu_costs.py
recompute_rules.py            what backward may recompute: by op, by the user
loop_op.py, own_ops.py        the ops that the passes add to a graph
node_meta.py, graph_text.py   metadata, the user's lines and modules, names
"""
