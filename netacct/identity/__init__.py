"""Which pod owns which address, and which addresses are whose: on this node, and in the cluster.

    leases, claims, names, workloads    the book: who holds what, what it is called (pure)
    source, heard, polling, stamp       what sources have in common
    file, pods_file                     the source `file`
    cni, cni_cache                      the source `cni`
    kubelet_pods_api, pod_book,         the source `kubelet-pods-api`; kube_* is what is known of a pod, by whichever way
      kube_pod, kube_proto, multus
    kubelet, https, json_list, node     the source `kubelet`
    cri, grpc_calls, grpc_messages      the source `cri`, and gRPC for both that speak it
    apiserver, reflector, kube_api      the source `apiserver`
    azure_cni, aws_cni, state_file      the sources of these names
    veth, route_follower                the source `veth`
    host_pods                           the source `cgroup`, for hostNetwork pods

    ranges                              the node's own addresses
    ranges_*, cloud, metadata_http      local ranges: a file for each provider
    cluster, cluster_*                  ranges of the whole cluster: a file for each place where they are written
"""
