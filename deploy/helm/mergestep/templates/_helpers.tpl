{{- define "mergestep.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "mergestep.labels" -}}
app.kubernetes.io/name: mergestep
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "mergestep.about" -}}
{{ include "mergestep.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "mergestep.ranks" -}}
{{- mul .Values.tensorParallelSize .Values.pipelineParallelSize -}}
{{- end -}}

{{- define "mergestep.secret" -}}
{{- if .Values.apiKey.existingSecret -}}
{{- .Values.apiKey.existingSecret -}}
{{- else -}}
{{- $_ := required "apiKey: name a Secret in existingSecret, or give a value" .Values.apiKey.value -}}
{{- include "mergestep.name" . -}}
{{- end -}}
{{- end -}}

{{- /* What every rank of a model is told. */ -}}
{{- define "mergestep.model-env" -}}
- name: MERGESTEP_MODEL
  value: {{ .Values.model | quote }}
- name: MERGESTEP_SERVED_MODEL_NAME
  value: {{ .Values.servedModelName | quote }}
- name: MERGESTEP_DRAIN_S
  value: {{ .Values.drainSeconds | quote }}
{{- if gt (include "mergestep.ranks" . | int) 1 }}
- name: MERGESTEP_TENSOR_PARALLEL_SIZE
  value: {{ .Values.tensorParallelSize | quote }}
- name: MERGESTEP_PIPELINE_PARALLEL_SIZE
  value: {{ .Values.pipelineParallelSize | quote }}
- name: MERGESTEP_GROUP_KEY_FILE
  value: /key/key
{{- end }}
{{- range $name, $value := .Values.settings }}
- name: MERGESTEP_{{ $name | upper }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- /* The pod that serves HTTP. */ -}}
{{- define "mergestep.server" -}}
{{ include "mergestep.pod" . }}
containers:
  - name: mergestep
    {{- include "mergestep.image" . | nindent 4 }}
    env:
      - name: POD_IP
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      - name: MERGESTEP_API_KEY
        valueFrom:
          secretKeyRef:
            name: {{ include "mergestep.secret" . }}
            key: {{ .Values.apiKey.key }}
      - name: MERGESTEP_PORT
        value: "8000"
      - name: MERGESTEP_SHARE_PREFIXES
        value: {{ .Values.sharePrefixes | quote }}
      {{- if .Values.kvEvents.enabled }}
      - name: MERGESTEP_KV_EVENTS
        value: "tcp://*:{{ .Values.kvEvents.port }}"
      - name: MERGESTEP_KV_EVENTS_TOPIC
        value: "kv@$(POD_IP):8000@{{ .Values.servedModelName }}"
      {{- end }}
      {{- include "mergestep.model-env" . | nindent 6 }}
    ports:
      - {name: http, containerPort: 8000}
      {{- if .Values.kvEvents.enabled }}
      - {name: kv-events, containerPort: {{ .Values.kvEvents.port }}}
      - {name: kv-replay, containerPort: {{ add .Values.kvEvents.port 1 }}}
      {{- end }}
    startupProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 2
      failureThreshold: 60
    livenessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 3
    readinessProbe:
      httpGet: {path: /ready, port: http}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 2
    {{- include "mergestep.container" . | nindent 4 }}
{{- end -}}

{{- define "mergestep.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{- /* What comes before a pod's containers. */ -}}
{{- define "mergestep.pod" -}}
terminationGracePeriodSeconds: {{ add .Values.endpointsSeconds .Values.drainSeconds 25 }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: cache
    {{- if .Values.cache.existingClaim }}
    persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
  - name: tmp
    emptyDir: {}
  {{- if gt (include "mergestep.ranks" . | int) 1 }}
  - name: key
    secret:
      secretName: {{ required "groupKeySecret: a model on several pods needs it" .Values.groupKeySecret }}
      defaultMode: 0440
  {{- end }}
  {{- with .Values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* What comes after a container's environment and probes. */ -}}
{{- define "mergestep.container" -}}
lifecycle:
  preStop: {sleep: {seconds: {{ .Values.endpointsSeconds }}}}
resources: {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: cache, mountPath: /var/cache/mergestep}
  - {name: tmp, mountPath: /tmp}
  {{- if gt (include "mergestep.ranks" . | int) 1 }}
  - {name: key, mountPath: /key, readOnly: true}
  {{- end }}
  {{- with .Values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
