"""Broken backends made by rule, and the share of them that the suite finds.

``python tests/conformance/mutation`` prints the share for each member; ``--help`` says more.
"""
