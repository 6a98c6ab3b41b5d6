"""Drafters inside the trainings of other projects.

A policy in reinforcement learning changes at every step, so a drafter of it falls behind. Here it
learns beside the policy, from what the policy writes. Nothing here needs the other project's
package: `trl.py` is a callback of `transformers`, which TRL calls.
"""
