"""The tests, flat: one file per module name.

A package, so that a test's import path is its file's path (`tests.ranks`) and no installed
package of the same name can take its place. Never shipped in the wheel.
"""
