"""What we use of custom resources, strictly: kubernetes-validate knows only Kubernetes' own.

A key that is not here is refused, so that a mistyped one is found; one that is new is added after
reading its documentation.
"""

from typing import Any

import jsonschema
import kubernetes_validate

TEXT = {"type": "string", "minLength": 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$", "minLength": 2}
NUMBER = {"type": "integer", "minimum": 0}


def exactly(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": required | optional,
        "additionalProperties": False,
    }


def many(item: dict[str, Any]) -> dict[str, Any]:
    """A list with at least one such item."""
    return {"type": "array", "items": item, "minItems": 1}


KEY = exactly({"name": TEXT, "key": TEXT})
ISSUER = exactly(
    {"name": TEXT, "kind": {"enum": ["Issuer"]}, "group": {"const": "cert-manager.io"}}
)
PRIVATE_KEY = exactly(
    {"algorithm": {"const": "ECDSA"}, "size": {"enum": [256, 384]}},
    rotationPolicy={"enum": ["Always", "Never"]},
)
ENDPOINT = exactly(
    {"port": TEXT, "path": TEXT, "interval": DURATION, "scrapeTimeout": DURATION},
    scheme={"enum": ["http", "https"]},
    authorization=exactly({"type": {"const": "Bearer"}, "credentials": KEY}),
    tlsConfig=exactly({"ca": exactly({"secret": KEY}), "serverName": TEXT}),
)
ALERT = exactly(
    {"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": LABELS}, **{"for": DURATION}
)
TRIGGER = exactly(
    {"type": {"const": "metrics-api"}, "metadata": LABELS},
    name=TEXT,
    metricType={"enum": ["AverageValue", "Value"]},
    authenticationRef=exactly({"name": TEXT}),
)
POLICY = exactly({"type": {"enum": ["Pods", "Percent"]}, "value": NUMBER, "periodSeconds": NUMBER})
SCALING_RULES = exactly(
    {"stabilizationWindowSeconds": NUMBER, "policies": many(POLICY)},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
)
BEHAVIOR = exactly({"scaleUp": SCALING_RULES, "scaleDown": SCALING_RULES})
JOB = exactly(
    {
        "name": TEXT,
        "replicas": NUMBER,
        # The rest is a Job's: held against Kubernetes' own schema below.
        "template": exactly({"spec": {"type": "object"}}, metadata={"type": "object"}),
    }
)

SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): exactly(
        {"selector": exactly({"matchLabels": LABELS}), "endpoints": many(ENDPOINT)}
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): exactly(
        {"groups": many(exactly({"name": TEXT, "rules": many(ALERT)}))}
    ),
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            exactly({"selfSigned": exactly({})}),
            exactly({"ca": exactly({"secretName": TEXT})}),
        ]
    },
    ("cert-manager.io/v1", "Certificate"): exactly(
        {
            "secretName": TEXT,
            "commonName": {"type": "string", "maxLength": 64},
            "privateKey": PRIVATE_KEY,
            "duration": DURATION,
            "issuerRef": ISSUER,
        },
        isCA={"type": "boolean"},
        dnsNames=many(TEXT),
        renewBefore=DURATION,
        usages=many({"enum": ["digital signature", "server auth", "client auth"]}),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): exactly(
        {
            "scaleTargetRef": exactly(
                {"name": TEXT}, kind={"const": "Deployment"}, apiVersion={"const": "apps/v1"}
            ),
            "minReplicaCount": NUMBER,
            "maxReplicaCount": NUMBER,
            "pollingInterval": NUMBER,
            "triggers": many(TRIGGER),
        },
        cooldownPeriod=NUMBER,
        initialCooldownPeriod=NUMBER,
        idleReplicaCount=NUMBER,
        fallback=exactly(
            {"failureThreshold": NUMBER, "replicas": NUMBER},
            behavior={
                "enum": [
                    "static",
                    "currentReplicas",
                    "currentReplicasIfHigher",
                    "currentReplicasIfLower",
                ]
            },
        ),
        advanced=exactly(
            {},
            restoreToOriginalReplicaCount={"type": "boolean"},
            horizontalPodAutoscalerConfig=exactly({"behavior": BEHAVIOR}, name=TEXT),
        ),
    ),
    ("keda.sh/v1alpha1", "TriggerAuthentication"): exactly(
        {"secretTargetRef": many(exactly({"parameter": TEXT, "name": TEXT, "key": TEXT}))}
    ),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): exactly(
        {"replicatedJobs": many(JOB)},
        network=exactly(
            {},
            enableDNSHostnames={"type": "boolean"},
            subdomain=TEXT,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=exactly(
            {"operator": {"enum": ["All", "Any"]}}, targetReplicatedJobs=many(TEXT)
        ),
        failurePolicy=exactly(
            {"maxRestarts": NUMBER},
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules=many(exactly({"name": TEXT, "action": TEXT, "onJobFailureReasons": many(TEXT)})),
        ),
        startupPolicy=exactly({"startupPolicyOrder": {"enum": ["AnyOrder", "InOrder"]}}),
        ttlSecondsAfterFinished=NUMBER,
        suspend={"type": "boolean"},
    ),
}
"""By apiVersion and kind: what `spec` may be."""


def is_custom(document: dict[str, Any]) -> bool:
    """Whether Kubernetes itself does not know it."""
    return (document["apiVersion"], document["kind"]) in SPECS


def validate(document: dict[str, Any], minor: str) -> None:
    """Raise jsonschema.ValidationError, or kubernetes_validate's, where it is not as declared."""
    schema = exactly(
        {
            "apiVersion": {"const": document["apiVersion"]},
            "kind": {"const": document["kind"]},
            "metadata": exactly(
                {"name": TEXT, "namespace": TEXT}, labels=LABELS, annotations=LABELS
            ),
            "spec": SPECS[document["apiVersion"], document["kind"]],
        }
    )
    jsonschema.validate(document, schema)
    if document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            inner = {"metadata": {"name": job["name"]}, **job["template"]}
            whole = {"apiVersion": "batch/v1", "kind": "Job", **inner}
            kubernetes_validate.validate(whole, minor, strict=True)
