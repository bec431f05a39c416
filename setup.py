"""Package discovery. The metadata is in pyproject.toml.

The top-level folders models/ and eval/ are installed as shadowkv.models and shadowkv.eval.
"""

from setuptools import find_packages, setup

MOUNTED = {"shadowkv.models": "models", "shadowkv.eval": "eval"}

packages = find_packages(include=["shadowkv", "shadowkv.*"])
for name, folder in MOUNTED.items():
    packages += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]

setup(
    packages=packages,
    package_dir={"shadowkv": "shadowkv", **MOUNTED},
    package_data={"shadowkv": ["py.typed"], "shadowkv.models": ["configs/*.json"]},
)
