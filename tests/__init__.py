"""The tests: a folder for each package of the product, in it a file for each module.

Beside those are `e2e` (whole programs), `equivalence`, `gpu`, `repository`, `support`.
A package, so that a test's import path is its file's path (`tests.support.ranks`) and no installed
package of the same name can take its place. Never shipped in the wheel.
"""
