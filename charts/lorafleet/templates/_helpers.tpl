{{/* Name of the release's objects. */}}
{{- define "lorafleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lorafleet.operatorName" -}}
{{- include "lorafleet.fullname" . }}-operator
{{- end -}}

{{- define "lorafleet.serviceAccount" -}}
{{- default (include "lorafleet.operatorName" .) .Values.operator.serviceAccount.name -}}
{{- end -}}

{{/* What the Deployment selects by; never changes. */}}
{{- define "lorafleet.selector" -}}
app.kubernetes.io/name: lorafleet
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "lorafleet.labels" -}}
{{ include "lorafleet.selector" . }}
app.kubernetes.io/part-of: lorafleet
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Reference of one image: (list context "engine"). */}}
{{- define "lorafleet.image" -}}
{{- $context := index . 0 -}}
{{- $component := index . 1 -}}
{{- $image := $context.Values.image -}}
{{- $whole := get $image $component -}}
{{- if $whole -}}
{{- $whole -}}
{{- else -}}
{{- printf "%s/%s:%s" $image.repository $component (default $context.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Rules that are generated from the operator's source: (list context "operator-cluster-rules"). */}}
{{- define "lorafleet.rules" -}}
{{- $context := index . 0 -}}
{{- $path := printf "files/rbac/%s.yaml" (index . 1) -}}
{{- required (printf "the chart lacks %s: cargo xtask crds makes it" $path) ($context.Files.Get $path) -}}
{{- end -}}
