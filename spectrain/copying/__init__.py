"""Copied drafts: matches in the text itself and in a store, and how probable their copies are.

This folder imports numpy alone, and its modules import each other by relative names, because a
package that an engine loads takes them along.
"""
