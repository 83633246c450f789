"""Which pod owns which address, and which addresses are whose: on this node, and in the cluster.

- The book (pure): `leases`, `claims`, `names`, `workloads`.
- What sources have in common: `source`, `heard`, `polling`, `stamp`.
- The source `file`: `file`, `pods_file`. The source `cni`: `cni`, `cni_cache`.
- The source `kubelet-pods-api`: `kubelet_pods_api`, `pod_book`; what is known of a pod, by whichever way it is told:
  `kube_pod`, `kube_proto`, `multus`.
- The source `kubelet`: `kubelet`, `https`, `apart`, `json_list`, `node`.
- The source `cri`: `cri`; gRPC for both that speak it: `grpc_calls`, `grpc_messages`.
- The source `apiserver`: `apiserver`, `reflector`, `kube_api`.
- The sources `azure-cni` and `aws-cni`: `azure_cni`, `aws_cni`, `state_file`. The source `veth`: `veth`,
  `route_follower`. The source `cgroup`, for hostNetwork pods: `host_pods`.
- The node's own addresses: `ranges`. Local ranges, a file for each provider: `ranges_*`, `cloud`, `metadata_http`.
- Ranges of the whole cluster, a file for each place where they are written: `cluster`, `cluster_*`.
"""
