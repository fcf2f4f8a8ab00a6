"""Model families of Hugging Face (model_type): config conversion and tensor keys.

Each module has one family, or a few that share most of their conversion. `registry.py` lists all
families. A config value is refused if Preamble would not compute the same as transformers. The
package opens no files.
"""
