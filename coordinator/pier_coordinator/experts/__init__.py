"""Domain experts at the coordinator: plans which site trains which expert, its size and its steps, and runs the plan.

The ensemble is that of HDEE (arXiv 2502.19385). The paper sets the difficulty of domains by hand and assigns nothing to
machines; estimating difficulty, allocating compute and assigning experts to sites go beyond it.
"""
