import json
import re

import pytest
import yaml
from pydantic import ValidationError

from config import names
from config.cluster import ObservabilityConfig
from stacks.node_repair import CONDITION, FATAL_XIDS
from stacks.prometheus import alerts
from training.config import describe_errors

MAIL = "ops@example.com"


@pytest.fixture(scope="session")
def observability(templates):
    return templates["observability"]


@pytest.fixture(scope="session")
def told(synthesize):
    """With somebody to tell, and a budget."""
    settings = {"alarm_email": MAIL, "monthly_budget_usd": 50_000}
    return synthesize(cluster={"observability": settings})["observability"]


def alarms(template):
    found = [r["Properties"] for r in template.find_resources("AWS::CloudWatch::Alarm").values()]
    return {alarm["MetricName"]: alarm for alarm in found}


@pytest.mark.parametrize(
    ("metric", "statistic", "comparison", "threshold"),
    [
        ("FreeDataStorageCapacity", "Sum", "LessThanThreshold", 4800 * 1024**3 / 10),
        ("cluster_failed_node_count", "Maximum", "GreaterThanOrEqualToThreshold", 1),
        ("node_gpu_limit", "Minimum", "LessThanThreshold", 8),
        ("cluster_node_count", "Minimum", "LessThanThreshold", 5),  # 2 + 1 GPU nodes and 2 system nodes
    ],
)
def test_alarms_of_the_shipped_deployment(observability, metric, statistic, comparison, threshold):
    alarm = alarms(observability)[metric]
    assert (alarm["Statistic"], alarm["ComparisonOperator"]) == (statistic, comparison)
    assert alarm["Threshold"] == pytest.approx(threshold)
    assert alarm["Period"] == 60


def test_every_alarm_says_when_it_begins_and_when_it_ends(observability, only):
    topic = only(observability, "AWS::SNS::Topic", "Topic")[0]
    for alarm in alarms(observability).values():
        assert alarm["AlarmActions"] == alarm["OKActions"] == [{"Ref": topic}]


def test_alarms_look_at_this_file_system_and_this_cluster(observability):
    found = alarms(observability)
    assert "FileSystem" in json.dumps(found["FreeDataStorageCapacity"]["Dimensions"])
    for name in ("cluster_failed_node_count", "node_gpu_limit", "cluster_node_count"):
        assert "RefCluster" in json.dumps(found[name]["Dimensions"])


def test_without_metrics_only_what_aws_reports_by_itself_is_watched(synthesize):
    template = synthesize(cluster={"observability": {"metrics": "none"}})["observability"]
    assert set(alarms(template)) == {"FreeDataStorageCapacity"}
    template.resource_count_is("AWS::Events::Rule", 1)


def test_the_end_of_a_blocks_nodes_is_no_alarm(synthesize):
    block = {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0", "started": True}
    template = synthesize(cluster={"capacity": block})["observability"]
    assert "cluster_node_count" not in alarms(template)
    assert "node_gpu_limit" in alarms(template)


def test_a_gpu_node_that_ends_is_told(observability, only):
    rule = only(observability, "AWS::Events::Rule", "GpuNodeEnded")[1]["Properties"]
    pattern = rule["EventPattern"]
    assert pattern["source"] == ["aws.autoscaling"]
    assert pattern["detail-type"] == ["EC2 Instance Terminate Successful"]
    (match,) = pattern["detail"]["AutoScalingGroupName"]
    text = json.dumps(match["prefix"])
    assert "eks-" in text
    assert "NodegroupName" in text
    topic = only(observability, "AWS::SNS::Topic", "Topic")[0]
    assert rule["Targets"][0]["Arn"] == {"Ref": topic}


def test_cloudwatch_and_eventbridge_may_use_the_topics_key(observability):
    (key,) = observability.find_resources("AWS::KMS::Key").values()
    for statement in key["Properties"]["KeyPolicy"]["Statement"][1:]:
        assert set(statement["Action"]) == {"kms:Decrypt", "kms:GenerateDataKey*"}
    text = json.dumps(key["Properties"]["KeyPolicy"]["Statement"][1:])
    assert "cloudwatch.amazonaws.com" in text
    assert "events.amazonaws.com" in text


def test_nobody_is_told_and_nothing_budgeted_until_the_deployment_says_so(observability):
    observability.resource_count_is("AWS::SNS::Subscription", 0)
    observability.resource_count_is("AWS::Budgets::Budget", 0)


def test_alarms_and_budget_go_to_the_address_of_the_deployment(told):
    told.has_resource_properties("AWS::SNS::Subscription", {"Protocol": "email", "Endpoint": MAIL})
    (budget,) = told.find_resources("AWS::Budgets::Budget").values()
    assert budget["Properties"]["Budget"]["BudgetLimit"] == {"Amount": 50_000, "Unit": "USD"}
    notifications = budget["Properties"]["NotificationsWithSubscribers"]
    assert [(n["Notification"]["NotificationType"], n["Notification"]["Threshold"]) for n in notifications] == [
        ("ACTUAL", 80),
        ("FORECASTED", 100),
    ]
    assert {n["Subscribers"][0]["Address"] for n in notifications} == {MAIL}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"monthly_budget_usd": 100}, ["monthly_budget_usd 100", "without alarm_email", "set that too"]),
        ({"alarm_email": "ops"}, ["alarm_email: ", "is no e-mail address", "ops@example.com"]),
        ({"metrics": "grafana"}, ["metrics: ", "'cloudwatch', 'prometheus' or 'none'", "grafana"]),
        ({"alarm_email": MAIL, "monthly_budget_usd": 0}, ["monthly_budget_usd: ", "0"]),
    ],
)
def test_a_wrong_setting_is_one_line(settings, words):
    with pytest.raises(ValidationError) as caught:
        ObservabilityConfig.model_validate(settings)
    (line,) = describe_errors(caught.value).splitlines()
    assert all(word in line for word in words), line


@pytest.fixture(scope="session")
def prometheus(synthesize):
    return synthesize(cluster={"observability": {"metrics": "prometheus"}})["observability"]


def test_prometheus_takes_the_place_of_container_insights_and_of_its_alarms(prometheus, synthesize):
    assert set(alarms(prometheus)) == {"FreeDataStorageCapacity"}
    cluster = synthesize(cluster={"observability": {"metrics": "prometheus"}})["cluster"]
    addons = [r["Properties"]["AddonName"] for r in cluster.find_resources("AWS::EKS::Addon").values()]
    assert "amazon-cloudwatch-observability" not in addons


def test_the_scraper_reads_the_cluster_from_two_zones_with_the_nodes_own_group(prometheus, only):
    scraper = only(prometheus, "AWS::APS::Scraper", "Prometheus")[1]["Properties"]
    source = scraper["Source"]["EksConfiguration"]
    assert len(source["SubnetIds"]) == 2
    assert "ClusterSecurityGroupId" in json.dumps(source["SecurityGroupIds"])
    scraped = yaml.safe_load(scraper["ScrapeConfiguration"]["ConfigurationBlob"]["Fn::Base64"])
    assert [job["job_name"] for job in scraped["scrape_configs"]] == ["dcgm-exporter", "pods", "cadvisor", "training"]


def test_the_scraper_reads_the_jobs_pods_on_the_port_that_the_manifests_name(prometheus, only, deployment_with):
    scraper = only(prometheus, "AWS::APS::Scraper", "Prometheus")[1]["Properties"]
    scraped = yaml.safe_load(scraper["ScrapeConfiguration"]["ConfigurationBlob"]["Fn::Base64"])
    (training,) = [job for job in scraped["scrape_configs"] if job["job_name"] == "training"]
    (discovery,) = training["kubernetes_sd_configs"]
    assert discovery["namespaces"] == {"names": [deployment_with().job.namespace]}
    keep = training["relabel_configs"][0]
    assert keep["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
    assert (keep["action"], keep["regex"]) == ("keep", names.METRICS_PORT_NAME)


@pytest.fixture(scope="session")
def rules(prometheus, only):
    namespace = only(prometheus, "AWS::APS::RuleGroupsNamespace", "Prometheus")[1]["Properties"]
    (group,) = yaml.safe_load(namespace["Data"])["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


@pytest.mark.parametrize(
    ("alert", "expression", "lasts"),
    [
        ("NodeUnhealthy", 'kube_node_status_condition{condition=~".*Ready",status!="true"} == 1', "3m"),
        ("GpusPerNode", 'kube_node_status_allocatable{resource="nvidia_com_gpu"} < 8', "10m"),
        ("Nodes", "count(kube_node_info) < 5 or absent(kube_node_info)", "15m"),
        ("GpuMetricsMissing", "absent(DCGM_FI_DEV_GPU_TEMP)", "15m"),
    ],
)
def test_prometheus_watches_what_the_alarms_of_cloudwatch_watch(rules, alert, expression, lasts):
    assert (rules[alert]["expr"], rules[alert]["for"]) == (expression, lasts)


def test_every_condition_that_node_repair_acts_on_is_one_that_the_alert_matches(rules):
    pattern = re.search(r'condition=~"([^"]+)"', rules["NodeUnhealthy"]["expr"]).group(1)
    agents = ["KernelReady", "NetworkingReady", "StorageReady", "ContainerRuntimeReady"]
    assert all(re.fullmatch(pattern, condition) for condition in ["Ready", CONDITION, *agents])
    assert not re.fullmatch(pattern, "MemoryPressure"), "which is good when false"


def test_an_xid_of_a_killed_program_is_no_alert_and_a_fatal_one_is(rules):
    expression = rules["GpuXidError"]["expr"]
    assert expression.startswith("DCGM_FI_DEV_XID_ERRORS > 0 unless (")
    left_out = {int(xid) for xid in re.findall(r"== (\d+)", expression)}
    assert 45 in left_out, "SIGKILL of a rank"
    assert not left_out & set(FATAL_XIDS)


def test_the_end_of_a_blocks_nodes_is_no_alert_either(deployment_with):
    block = {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0"}
    deployment = deployment_with(cluster={"capacity": block})
    (group,) = alerts(deployment.cluster, deployment.job)["groups"]
    assert [rule["alert"] for rule in group["rules"]] == ["NodeUnhealthy", "GpusPerNode", "GpuXidError"]


def test_what_the_alerts_read_is_installed_annotated_for_the_scraper_and_on_system_nodes(synthesize):
    template = synthesize(cluster={"observability": {"metrics": "prometheus"}})["cluster"]
    (chart,) = [
        resource["Properties"]
        for resource in template.find_resources("Custom::AWSCDK-EKS-HelmChart").values()
        if resource["Properties"]["Chart"] == "kube-state-metrics"
    ]
    values = json.loads(chart["Values"])
    assert chart["Version"] == "7.5.1"
    assert values["podAnnotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": "8080"}
    assert "nodes" in values["collectors"]
    assert values["nodeSelector"] == {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM}


def test_without_prometheus_nothing_reads_kube_state_metrics_and_it_is_not_there(templates):
    charts = templates["cluster"].find_resources("Custom::AWSCDK-EKS-HelmChart").values()
    assert "kube-state-metrics" not in {chart["Properties"]["Chart"] for chart in charts}


def test_alerts_reach_the_topic(prometheus, only):
    workspace = only(prometheus, "AWS::APS::Workspace", "Prometheus")[1]["Properties"]
    parts = workspace["AlertManagerDefinition"]["Fn::Join"][1]
    topic = only(prometheus, "AWS::SNS::Topic", "Topic")[0]
    text = "".join("TOPIC" if part == {"Ref": topic} else part if isinstance(part, str) else "X" for part in parts)
    config = yaml.safe_load(yaml.safe_load(text)["alertmanager_config"])
    assert config["receivers"][0]["sns_configs"][0]["topic_arn"] == "TOPIC"
    policy = json.dumps(only(prometheus, "AWS::SNS::TopicPolicy", "Topic")[1])
    assert "aps.amazonaws.com" in policy
    key = json.dumps(only(prometheus, "AWS::KMS::Key", "TopicKey")[1])
    assert "aps.amazonaws.com" in key


def test_the_workspace_has_no_key_of_ours_which_a_managed_scraper_cannot_write_with(prometheus, only):
    assert "KmsKeyArn" not in only(prometheus, "AWS::APS::Workspace", "Prometheus")[1]["Properties"]


def test_prometheus_without_dcgm_exporter_has_nothing_to_read(deployment_with):
    with pytest.raises(ValidationError, match="reads the GPUs from dcgm-exporter; set addons.dcgm_exporter to true"):
        deployment_with(cluster={"observability": {"metrics": "prometheus"}, "addons": {"dcgm_exporter": False}})


def test_a_budget_where_cloudformation_makes_none_is_one_line(deployment_with):
    place = {"region": "eu-north-1", "availability_zone": "eu-north-1a", "second_availability_zone": "eu-north-1b"}
    with pytest.raises(ValidationError) as caught:
        deployment_with(cluster=place | {"observability": {"alarm_email": MAIL, "monthly_budget_usd": 100}})
    (line,) = describe_errors(caught.value).splitlines()
    assert "observability.monthly_budget_usd 100: CloudFormation makes no budget in eu-north-1; leave it out" in line
