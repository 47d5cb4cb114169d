"""The custom resources of Millrace and the chart's values, as models that describe and parse.

`python -m millrace_operator.schema` writes the CustomResourceDefinitions to charts/millrace/crds.
"""

GROUP = "millrace.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
