{{- define "shadowkv.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "shadowkv.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "shadowkv.labels" -}}
{{ include "shadowkv.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "shadowkv.several" -}}
{{- if or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}yes{{ end }}
{{- end }}

{{- /* Number of engines of a server. */}}
{{- define "shadowkv.engines" -}}
{{- $given := get .Values.flags "data-parallel-size" }}
{{- if kindIs "invalid" $given }}1{{ else }}{{ $given | toString | default "1" }}{{ end }}
{{- end }}

{{- /* The server's flags, one a line, behind the image's "shadowkv serve --host 0.0.0.0". */}}
{{- define "shadowkv.flags" -}}
- --port=8000
- {{ printf "--model=%s" .Values.model | quote }}
{{- range $name, $value := .Values.flags }}
{{- if kindIs "bool" $value }}
- --{{ $name }}
{{- else if kindIs "slice" $value }}
- --{{ $name }}
{{- range $value }}
- {{ . | quote }}
{{- end }}
{{- else if kindIs "float64" $value }}
- --{{ $name }}={{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- $each := div (int .Values.gpus) (int (include "shadowkv.engines" .)) }}
{{- if gt $each 1 }}
- --tensor-parallel-size={{ $each }}
{{- end }}
{{- with .Values.segments }}
- --kv-disk-dir=/segments
- --kv-disk-gib={{ int64 .gib }}
{{- end }}
- --shutdown-timeout={{ int64 .Values.shutdownTimeout }}
{{- end }}

{{- /* Refuses values that do not go together, which the schema cannot see. */}}
{{- define "shadowkv.check" -}}
{{- if include "shadowkv.several" . }}
{{- range $name := list "cache" "segments" }}
{{- with index $.Values $name }}
{{- if and (not .existingClaim) (ne .accessMode "ReadWriteMany") }}
{{- fail (printf "%s.accessMode=%s: several servers need ReadWriteMany, or %s=null" $name .accessMode $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $engines := include "shadowkv.engines" . }}
{{- if not (regexMatch "^[1-9][0-9]*$" $engines) }}
{{- fail (printf "flags.data-parallel-size=%s must be a whole number of engines, at least 1" $engines) }}
{{- end }}
{{- if mod (int .Values.gpus) (int $engines) }}
{{- fail (printf "gpus=%v must be a multiple of flags.data-parallel-size=%s: every engine has as many" .Values.gpus $engines) }}
{{- end }}
{{- if and .Values.secret.create (not .Values.secret.apiKeys) }}
{{- fail "secret.create needs secret.apiKeys: without keys the server would answer anybody" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas=%v is more than maxReplicas=%v" .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) }}
{{- end }}
{{- end }}
